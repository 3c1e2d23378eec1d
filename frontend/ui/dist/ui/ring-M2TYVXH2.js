import{i as n}from"./chunk-NPJVUHO4.js";function i(){return n("section",{class:"page",children:n("h1",{children:"Ring"})})}export{i as Ring};
